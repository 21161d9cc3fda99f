"""Does a model learn the same in every layout of ranks?"""
