"""Say which values the fields of a configuration take: types and bounds, POD types, texts.

Nothing here knows the configuration's class; what is wrong names field and value.
"""
