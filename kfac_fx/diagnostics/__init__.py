"""Checks of the first step: is the trained loss the one whose curvature is estimated?"""
