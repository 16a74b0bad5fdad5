"""A form of the rotary embedding that first normalises the heads of query and key."""
