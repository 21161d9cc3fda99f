"""Does `samo plan` predict what a step takes?"""
