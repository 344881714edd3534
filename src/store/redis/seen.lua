-- Notes that an owner is alive, by this server's clock. Unlike its lease, this key has no expiry, so a server that
-- evicts keys with an expiry keeps it.
-- KEYS owners; ARGV owner
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
redis.call('ZADD', KEYS[1], string.format('%.3f', now), ARGV[1])
return {'ok'}
