-- Settles requests of one tenant that have ended, and charges another one to all of its limits or to none.
-- Times are microseconds of this server's clock. A limit is a field of `limits`: the time at which all of it may be
-- used again. `running` has the requests that are charged and not settled, by the end of their lease; `charged` the
-- background responses that were charged (`c:`) or settled (`s:`), by when that is forgotten.
-- KEYS limits, running, charged
-- ARGV an array in MessagePack:
--      number of settlements, for each: id, 1 if it is charged once (2: and given back), number of corrections, for each:
--      limit, micros; then nothing more, or: id, 1 if it is charged once, concurrent requests or 0, lease, time of
--      charges once, 1 if what the replica believes counts, and for each limit: its name, burst, cost, believed
local MAX_DEBT = 3600000000
local KEEP_MS = 7200000

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local limits, running, charged = KEYS[1], KEYS[2], KEYS[3]

local values = cmsgpack.unpack(ARGV[1])
local at = 0
local function next_value()
  at = at + 1
  return values[at]
end

local function format(micros)
  return string.format('%.0f', micros)
end

local is_changed = false

for _ = 1, next_value() do
  local id, once, count = next_value(), next_value(), next_value()
  local applies = redis.call('ZREM', running, id) == 1
  if applies and once == 2 then
    applies = not redis.call('ZSCORE', charged, 's:' .. id)
    if applies then
      redis.call('ZREM', charged, 'c:' .. id)
    end
  elseif applies and once == 1 then
    -- Kept for as long as its charge.
    local until_ = redis.call('ZSCORE', charged, 'c:' .. id) or format(now + MAX_DEBT)
    applies = redis.call('ZADD', charged, 'NX', until_, 's:' .. id) == 1
  end
  for _ = 1, count do
    local limit, micros = next_value(), next_value()
    if applies then
      local full_at = math.max(tonumber(redis.call('HGET', limits, limit) or '0'), now) + micros
      redis.call('HSET', limits, limit, format(math.min(full_at, now + MAX_DEBT)))
      is_changed = true
    end
  end
end

if at == #values then
  if is_changed then
    redis.call('PEXPIRE', limits, KEEP_MS)
  end
  return {'settled'}
end

local id, is_once, max_concurrent = next_value(), next_value() == 1, next_value()
local lease, once, was_apart = next_value(), next_value(), next_value() == 1
local count = (#values - at) / 4

-- Of replicas that are gone.
redis.call('ZREMRANGEBYSCORE', running, '-inf', format(now))
local runs = redis.call('ZSCORE', running, id)
local is_charged = runs
if is_once and not runs then
  redis.call('ZREMRANGEBYSCORE', charged, '-inf', format(now))
  is_charged = redis.call('ZSCORE', charged, 'c:' .. id)
end
local others = redis.call('ZCARD', running)
if runs then
  others = others - 1
end

local names, bursts, costs, believed = {}, {}, {}, {}
for i = 1, count do
  names[i], bursts[i], costs[i], believed[i] = next_value(), next_value(), next_value(), next_value()
end
local found = count > 0 and redis.call('HMGET', limits, unpack(names)) or {}
local is_granted = max_concurrent == 0 or others < max_concurrent or runs
local full_at = {}
for i = 1, count do
  local stored = found[i] and tonumber(found[i])
  local micros = math.max(stored or 0, now)
  if was_apart or not stored then
    micros = math.max(micros, now + believed[i])
  end
  full_at[i] = micros
  if not is_charged and micros + costs[i] - now > bursts[i] then
    is_granted = false
  end
end

if is_granted then
  local fields = {}
  for i = 1, count do
    if not is_charged then
      full_at[i] = full_at[i] + costs[i]
    end
    fields[2 * i - 1], fields[2 * i] = names[i], format(full_at[i])
  end
  if count > 0 then
    redis.call('HSET', limits, unpack(fields))
    is_changed = true
  end
  redis.call('ZADD', running, format(now + lease), id)
  redis.call('PEXPIRE', running, format(lease / 500))
  if is_once and not is_charged then
    redis.call('ZADD', charged, format(now + once), 'c:' .. id)
    redis.call('PEXPIRE', charged, format(once / 500))
  end
  others = others + 1
end
if is_changed then
  redis.call('PEXPIRE', limits, KEEP_MS)
end

local reply = {is_granted and 'granted' or 'refused', others}
for i = 1, count do
  reply[i + 2] = format(full_at[i] - now)
end
return {table.concat(reply, ' ')}
