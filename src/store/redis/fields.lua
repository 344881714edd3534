-- Reads fields of a hash. A script, so that its reply says which call it belongs to.
-- KEYS hash; ARGV fields
return redis.call('HMGET', KEYS[1], unpack(ARGV))
