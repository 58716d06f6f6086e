"""Parts that networks of several domains are made of, and the words in which a network says how it is cut."""
