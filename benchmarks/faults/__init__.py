"""How soon is a run gone when one of its ranks is killed or stopped?"""
