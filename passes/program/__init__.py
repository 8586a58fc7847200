"""Write the program from the stages' graphs, and rewrite it as an IPU would run it.

What lasts is written by instructions, but for gradients and buffers that functions still write.
"""
