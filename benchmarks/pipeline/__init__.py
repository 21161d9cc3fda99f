"""Does a message-driven pipeline lose less time to jitter than one of fixed order?"""
