-- Renews the leases of a tenant's running requests, and returns how many run on all replicas.
-- KEYS running; ARGV lease in microseconds, ids
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local ends = string.format('%.0f', now + tonumber(ARGV[1]))
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', tonumber(ARGV[1]) / 500))
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
return {tostring(redis.call('ZCARD', KEYS[1]))}
