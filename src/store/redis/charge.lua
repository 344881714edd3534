-- Settles requests of one tenant that have ended, and charges others, each to all of its limits or to none.
-- Times are microseconds of this server's clock; in `limits` of a clock that never runs back, which is this server's
-- with the field `+` added, and was at `@` when a limit was written last. Each other field of `limits` is a limit: the
-- time at which all of it may be used again. `running` has the requests that are charged and not settled, by the end of
-- their lease; `charged` the background responses that were charged (`c:`) or settled (`s:`), by when that is
-- forgotten, and the lines of batches that are charged and not settled (`c:`). Lines are not among `running`.
-- KEYS limits, running, charged
-- ARGV two arrays in MessagePack, the second of which may be left out:
--      settlements: id, 1 if it is charged once (2: and given back; 3: a line), number of corrections, for each: limit,
--      micros
--      charges: lease, time of charges once, and for each: id, 1 if it is charged once (2: a line), concurrent requests
--      or 0, 1 if what the replica believes counts, number of limits, for each: its name, burst, cost, believed
-- Returns for each charge what became of it, separated by commas, in one text.
local MAX_DEBT = 3600000000
-- Of the limit `d`, which is one of a day, as much more may be used at once.
local DAY = 86400000000
-- A day and two hours, after which nothing is used of any limit.
local KEEP_MS = 93600000

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local limits, running, charged = KEYS[1], KEYS[2], KEYS[3]

local function format(micros)
  return string.format('%.0f', micros)
end

-- If this server's clock is set back, or a replica whose clock is behind takes over, limits would otherwise stay used
-- up until the former time comes again.
local clock = redis.call('HMGET', limits, '@', '+')
local limits_now = now + (tonumber(clock[2] or '') or 0)
local written = tonumber(clock[1] or '') or 0
if written > limits_now then
  limits_now = written
  redis.call('HSET', limits, '+', format(written - now))
end

local values, at
local function next_value()
  at = at + 1
  return values[at]
end

-- Each limit is read once, and written once if it has changed. `false`: Redis has none.
local known, changed = {}, {}
local function full_at(limit)
  local micros = known[limit]
  if micros == nil then
    micros = tonumber(redis.call('HGET', limits, limit) or '') or false
    known[limit] = micros
  end
  return micros
end

local function set_full_at(limit, micros)
  known[limit], changed[limit] = micros, true
end

local function latest(limit)
  if limit == 'd' then
    return limits_now + DAY + MAX_DEBT
  end
  return limits_now + MAX_DEBT
end

values, at = cmsgpack.unpack(ARGV[1]), 0
while at < #values do
  local id, once, count = next_value(), next_value(), next_value()
  local applies
  if once == 3 then
    applies = redis.call('ZREM', charged, 'c:' .. id) == 1
  else
    applies = redis.call('ZREM', running, id) == 1
  end
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
      micros = math.max(full_at(limit) or 0, limits_now) + micros
      set_full_at(limit, math.min(micros, latest(limit)))
    end
  end
end

local replies, lease = {}, nil
-- Granted ones, once each, and as arguments of ZADD.
local granted, members = {}, {}

if ARGV[2] then
  values, at = cmsgpack.unpack(ARGV[2]), 0
  lease = next_value()
  local once = next_value()
  local ends = format(now + lease)
  -- Of replicas that are gone.
  redis.call('ZREMRANGEBYSCORE', running, '-inf', format(now))
  local running_count = redis.call('ZCARD', running)
  while at < #values do
    local id, once_flag, max_concurrent = next_value(), next_value(), next_value()
    local is_line, is_kept = once_flag == 2, once_flag > 0
    local was_apart, count = next_value() == 1, next_value()
    local runs = granted[id] or redis.call('ZSCORE', running, id)
    local is_charged = runs
    if is_kept and not runs then
      redis.call('ZREMRANGEBYSCORE', charged, '-inf', format(now))
      is_charged = redis.call('ZSCORE', charged, 'c:' .. id)
    end
    local others = running_count
    if runs then
      others = others - 1
    end
    local is_granted = max_concurrent == 0 or others < max_concurrent or runs
    local names, used, costs = {}, {}, {}
    for i = 1, count do
      local name, burst, cost, believed = next_value(), next_value(), next_value(), next_value()
      local stored = full_at(name)
      local micros = math.max(stored or 0, limits_now)
      if was_apart or not stored then
        micros = math.max(micros, limits_now + believed)
      end
      if not is_charged and micros + cost - limits_now > burst then
        is_granted = false
      end
      names[i], used[i], costs[i] = name, micros, cost
    end
    if is_granted then
      for i = 1, count do
        if not is_charged then
          used[i] = used[i] + costs[i]
        end
        set_full_at(names[i], used[i])
      end
      if not granted[id] and not is_line then
        granted[id] = true
        members[#members + 1] = ends
        members[#members + 1] = id
      end
      if is_kept and not is_charged then
        redis.call('ZADD', charged, format(now + once), 'c:' .. id)
        redis.call('PEXPIRE', charged, format(once / 500))
      end
      if not runs and not is_line then
        running_count = running_count + 1
      end
      if not is_line then
        others = others + 1
      end
    end
    local reply = {is_granted and 'granted' or 'refused', others}
    for i = 1, count do
      reply[i + 2] = format(used[i] - limits_now)
    end
    replies[#replies + 1] = table.concat(reply, ' ')
  end
end

local fields = {}
for limit in pairs(changed) do
  fields[#fields + 1] = limit
  fields[#fields + 1] = format(known[limit])
end
if #fields > 0 then
  redis.call('HSET', limits, '@', format(limits_now), unpack(fields))
  redis.call('PEXPIRE', limits, KEEP_MS)
end
if #members > 0 then
  redis.call('ZADD', running, unpack(members))
  redis.call('PEXPIRE', running, format(lease / 500))
end
return {table.concat(replies, ',')}
