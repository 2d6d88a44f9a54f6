"""Whose bytes are they, do they keep rising, and who keeps them?"""
