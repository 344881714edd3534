-- Claims the events of an endpoint that are due, and drops those that are too old.
-- KEYS as in outbox_add.lua; ARGV maximum, lease in ms, maximum age in ms, how many old ones to drop at most,
-- fingerprint, TTL of ho in ms, TTL of hu in ms, maximum of fingerprints in it, whether the fingerprint is a new
-- address of the endpoint (1 or 0)
-- Returns ok or off, events in the queue, ms until the next is due (-1: none), age of the oldest in ms (-1: none), how
-- many were dropped (off: because the endpoint takes none); then of each event the response, its entry with this
-- attempt, and its age in ms
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local function text(number)
  return string.format('%.0f', number)
end
local score = redis.call('ZSCORE', KEYS[5], ARGV[5])
if not score or ARGV[9] == '1' then
  -- Above all others, also where the clock stands still or runs back.
  local newest = tonumber(redis.call('ZREVRANGE', KEYS[5], 0, 0, 'WITHSCORES')[2]) or 0
  score = math.max(now, newest + 1)
  redis.call('ZADD', KEYS[5], text(score), ARGV[5])
  for _, oldest in ipairs(redis.call('ZRANGE', KEYS[5], 0, text(-1 - tonumber(ARGV[8])))) do
    redis.call('ZREM', KEYS[5], oldest)
  end
end
-- Without claims with the newest one all are forgotten.
local is_newest = redis.call('ZREVRANGE', KEYS[5], 0, 0)[1] == ARGV[5]
if is_newest then
  redis.call('PEXPIRE', KEYS[5], ARGV[7])
end
if tonumber(score) < 0 then
  return {'off', '0', '-1', '-1', '0'}
end
if redis.call('GET', KEYS[4]) == ARGV[5] then
  redis.call('PEXPIRE', KEYS[4], ARGV[6])
  local dropped = 0
  -- What waits came while there was a newer one, and nobody takes it any more.
  if is_newest then
    dropped = redis.call('ZCARD', KEYS[2])
    redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
  end
  return {'off', '0', '-1', '-1', text(dropped)}
end
local function drop(response)
  redis.call('ZREM', KEYS[1], response)
  redis.call('ZREM', KEYS[2], response)
  redis.call('HDEL', KEYS[3], response)
end
local old = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', text(now - tonumber(ARGV[3])), 'LIMIT', 0, ARGV[4])
for _, response in ipairs(old) do
  drop(response)
end
local events = {}
for _, response in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', text(now), 'LIMIT', 0, ARGV[1])) do
  local entry = redis.call('HGET', KEYS[3], response)
  local rest, attempt = string.match(entry or '', '^(.*) (%d+)$')
  if rest then
    entry = rest .. ' ' .. text(tonumber(attempt) + 1)
    redis.call('HSET', KEYS[3], response, entry)
    -- Not due at once, so that one claim has no event twice.
    redis.call('ZADD', KEYS[1], text(now + math.max(tonumber(ARGV[2]), 1)), response)
    local added = tonumber(redis.call('ZSCORE', KEYS[2], response) or now)
    events[#events + 1] = response
    events[#events + 1] = entry
    events[#events + 1] = text(math.max(now - added, 0))
  else
    drop(response)
  end
end
local function first(key)
  return tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
end
local due, added = first(KEYS[1]), first(KEYS[2])
return {
  'ok', text(redis.call('ZCARD', KEYS[2])), due and text(math.max(due - now, 0)) or '-1',
  added and text(math.max(now - added, 0)) or '-1', text(#old), unpack(events),
}
