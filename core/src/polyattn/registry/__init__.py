"""What is here: plugins, their distributions and what they speak. It knows no kernel and makes no choice."""
