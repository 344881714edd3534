-- Creates a conversation, adds items to it, or commits the items of the response that locked it.
-- A conversation is a hash (v, tk token of its creation, ob object, nx next position, by bytes of items,
-- la and lc tokens of the last additions and commits, newest first, lk and lu holder and end of its lock), a hash of items
-- (`i:<id>` -> `<bytes>:<packed value>`, pieces of large ones beside them) and a sorted set of their ids.
-- KEYS conversation, items, order; ARGV create, add or commit; token; ttl in ms (0: none); maximum
-- bytes of items; the object ('' but for create); how many tokens are remembered; then id, bytes and value of
-- each item
return put_items(KEYS, ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], 7, #ARGV)
