"""Linear attention: gated delta rules, whose memory is a matrix for each head."""
