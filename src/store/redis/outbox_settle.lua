-- Settles an event that was claimed: it leaves the queue, or is due again later.
-- KEYS hd, ha, he as in outbox_add.lua; ARGV response, attempt, ms until it is due again or ''
-- Returns ok, or stale if another claim has taken its place or it was dropped
local entry = redis.call('HGET', KEYS[3], ARGV[1])
if not entry or string.match(entry, '(%d+)$') ~= ARGV[2] then
  return {'stale'}
end
if ARGV[3] == '' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('HDEL', KEYS[3], ARGV[1])
else
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[3])), ARGV[1])
end
return {'ok'}
