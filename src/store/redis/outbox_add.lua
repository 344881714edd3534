-- Adds the event of a response or a batch that has ended to the queue of an endpoint.
-- A queue is three keys: `hd`, what has ended by when its event is due; `ha`, by when that was added; `he`, for each
-- status, Unix seconds of its end, and attempts. `ho` is the fingerprint of an endpoint that takes no events. `hu` has
-- the fingerprints that events were claimed with, by when each became the newest: of replicas that have not read a new
-- configuration yet, one that is not the newest. Below 0 is one that was disabled while it was not.
-- KEYS hd, ha, he, ho, hu; ARGV response or batch, status, seconds, fingerprint, maximum of events, TTL in ms
-- Returns ok, again or off, and how many events made room
if redis.call('GET', KEYS[4]) == ARGV[4] and (redis.call('ZREVRANGE', KEYS[5], 0, 0)[1] or ARGV[4]) == ARGV[4] then
  return {'off', '0'}
end
if redis.call('HEXISTS', KEYS[3], ARGV[1]) == 1 then
  return {'again', '0'}
end
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local surplus = redis.call('ZCARD', KEYS[2]) - math.max(tonumber(ARGV[5]), 1)
local dropped = 0
if surplus >= 0 then
  -- After the maximum was lowered there may be many: a few at a time.
  for _, oldest in ipairs(redis.call('ZRANGE', KEYS[2], 0, math.min(surplus, 99))) do
    redis.call('ZREM', KEYS[1], oldest)
    redis.call('ZREM', KEYS[2], oldest)
    redis.call('HDEL', KEYS[3], oldest)
    dropped = dropped + 1
  end
end
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2] .. ' ' .. ARGV[3] .. ' 0')
for number = 1, 3 do
  redis.call('PEXPIRE', KEYS[number], ARGV[6])
end
return {'ok', tostring(dropped)}
