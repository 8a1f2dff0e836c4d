"""The calls: arguments become a key, a key becomes a request, a request becomes a bound kernel."""
