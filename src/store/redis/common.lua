-- Prepended to every script: the record format and shared functions. A script uses only the keys that it is
-- given, all of one slot, and returns an array of strings, the first of which is the outcome.
--
-- A response is one hash:
--   v  version of the record         st status            tk token of its creation
--   in, re, ou, cu, rq               input, response, output, delta table, request: packed values
--   il, ol  bytes of input, output   hi routing hint      pa, pb chain: own parts of ids, bytes
--   an anchors of a chain of more than 128 turns: own parts of the ids of each 128th, whose `pa` has the 128 before it; the
--      `pa` of this record then begins with the newest anchor
-- and, for background responses only:
--   bg 1    own owner, or empty      ep fencing number    at attempts      sm streams
--   rt retention (s, e)              sq last event, or -1 lb bytes of log  lx log lost events
--   ft token of its end              was status before a cancel   am has its partial output after a cancel
--   bn fencing number whose run an engine began                    lo owners that were lost with it
--   wh until its event is queued: Unix seconds of its end, `:`, names of webhook endpoints
--   po 1 after a cancel, until the output that readers received is stored; the request is kept until then
-- A running record has no expiry: it lives for as long as it runs.
-- A value too large for one field is the text `c<nonce>:<count>`, and its pieces are in the fields
-- `<name>:<nonce>:<n>`, which are written first. The log is a stream: entry <last + 1>-0 contains the
-- events `f` to last, encoded as `b`; behind those, releases that know them have the tokens `t`.
--
-- The version is raised when an older release would damage a record. A script changes no record of a newer
-- version.
-- 2: a record with `an`, which older releases would take for one of a shorter chain. All others are written as 1.
local VERSION, NEWEST = 1, 2

local function is_newer(v)
  return v and tonumber(v) > NEWEST
end

local function runs(status)
  return status == 'queued' or status == 'in_progress'
end

local function expire(key, ttl_ms)
  if tonumber(ttl_ms) > 0 then
    redis.call('PEXPIRE', key, ttl_ms)
  else
    redis.call('PERSIST', key)
  end
end

-- Extends the TTL of a response that others continue to the TTL of the continuation, plus a tenth, so that a
-- chain in use is renewed once per twentieth of the TTL instead of with each turn, and a run may take as long. Uses pcall, because a Redis
-- that refuses writes can still serve reads. False if there is no such response.
local function renew(key, ttl_ms)
  local ttl, left = tonumber(ttl_ms), redis.call('PTTL', key)
  if left >= 0 and ttl == 0 then
    redis.pcall('PERSIST', key)
  elseif left >= 0 and left < ttl * 1.05 then
    redis.pcall('PEXPIRE', key, string.format('%.0f', ttl * 1.1))
  end
  return left ~= -2
end

-- Returns the place of the newest of these keys, from `from` on, that is missing; nil if all exist.
local function newest_missing(keys, from)
  -- Lua passes some thousand arguments at most.
  for first = from, #keys, 1000 do
    local last = math.min(first + 999, #keys)
    if redis.call('EXISTS', unpack(keys, first, last)) <= last - first then
      for at = #keys, from, -1 do
        if redis.call('EXISTS', keys[at]) == 0 then
          return at
        end
      end
    end
  end
end

-- Whether the first response of a chain, and so maybe others, is to be renewed, or is missing.
local function is_outdated(first, ttl_ms)
  local ttl, left = tonumber(ttl_ms), redis.call('PTTL', first)
  return left == -2 or left >= 0 and (ttl == 0 or left < ttl * 1.05)
end

-- Extends the TTL of the responses of a chain whose records are `keys` from `from` on, oldest first. Returns the place of
-- the newest that is missing, or nil. The newest was never renewed with the others. They were renewed together, and the
-- first has at most a twentieth of the TTL more than any other.
local function keep_chain(keys, from, ttl_ms)
  local missing = newest_missing(keys, from)
  if missing or #keys < from then
    return missing
  end
  renew(keys[#keys], ttl_ms)
  if is_outdated(keys[from], ttl_ms) then
    for at = from, #keys do
      renew(keys[at], ttl_ms)
    end
  end
end

-- Returns a value, assembled from its pieces if it is split. False if the value or a piece is missing.
local function value(key, name, found)
  if not found or string.sub(found, 1, 1) ~= 'c' then
    return found
  end
  local nonce, count = string.match(found, '^c(%x+):(%d+)$')
  local pieces = {}
  for piece = 0, tonumber(count) - 1 do
    local bytes = redis.call('HGET', key, name .. ':' .. nonce .. ':' .. piece)
    if not bytes then
      return false
    end
    pieces[piece + 1] = bytes
  end
  return table.concat(pieces)
end

-- Deletes the pieces of a value that is about to be replaced.
local function drop_pieces(key, name)
  local found = redis.call('HGET', key, name)
  if found and string.sub(found, 1, 1) == 'c' then
    local nonce, count = string.match(found, '^c(%x+):(%d+)$')
    for piece = 0, tonumber(count) - 1 do
      redis.call('HDEL', key, name .. ':' .. nonce .. ':' .. piece)
    end
  end
end

-- Returns why this owner may not write to the response; nil if it may.
local function refusal(v)
  if not v.st then
    return {'gone'}
  end
  if is_newer(v.v) then
    return {'newer', v.v}
  end
  if v.bg ~= '1' then
    return {'terminal', v.st}
  end
  if v.own ~= v.by_owner or v.ep ~= v.by_number then
    return {'fenced'}
  end
  if not runs(v.st) then
    return {'terminal', v.st}
  end
end

local function load(key, owner, fencing_number)
  local v = redis.call('HMGET', key, 'v', 'st', 'bg', 'own', 'ep', 'sq', 'lb', 'lx', 'ft', 'rt', 'am')
  return {
    v = v[1], st = v[2], bg = v[3], own = v[4], ep = v[5], sq = tonumber(v[6] or '-1'),
    lb = tonumber(v[7] or '0'), lx = v[8], ft = v[9], rt = v[10], am = v[11],
    by_owner = owner, by_number = fencing_number,
  }
end

-- Returns why these events do not follow the end of the log; nil if they do.
local function sequence_mismatch(v, first, last)
  if first == v.sq + 1 and last >= first then
    return nil
  end
  if last <= v.sq then
    return {'duplicate', tostring(v.sq)}
  end
  return {'gap', tostring(v.sq)}
end

-- Appends events to the log, and drops its oldest ones if it becomes too large. `tokens` may be nil.
local function log(v, rec, events, first, last, batch, bytes_max, tokens)
  v.sq = last
  v.lb = v.lb + #batch
  local entry = {'f', string.format('%.0f', first), 'b', batch}
  if tokens and tokens ~= '' then
    entry[5], entry[6] = 't', tokens
    v.lb = v.lb + #tokens
  end
  redis.call('XADD', events, string.format('%.0f-0', last + 1), unpack(entry))
  while v.lb > bytes_max do
    v.lx = '1'
    local oldest = redis.call('XRANGE', events, '-', '+', 'COUNT', 1)[1]
    if not oldest then
      -- An older release dropped the whole log.
      v.lb = 0
    else
      redis.call('XDEL', events, oldest[1])
      v.lb = v.lb - #oldest[2][4] - #(oldest[2][6] or '')
    end
  end
  redis.call('HSET', rec, 'sq', string.format('%.0f', last), 'lb', v.lb)
  if v.lx then
    redis.call('HSET', rec, 'lx', '1')
  end
end

local function drop_request(rec)
  drop_pieces(rec, 'rq')
  redis.call('HDEL', rec, 'rq')
end

-- Ends a response: status, token and expiry. `ttl` is for stored responses, `ephemeral_ttl` for ephemeral ones.
local function finish(v, rec, events, status, token, ttl, ephemeral_ttl, log_ttl)
  redis.call('HSET', rec, 'st', status, 'ft', token)
  expire(rec, v.rt == 'e' and ephemeral_ttl or ttl)
  redis.call('PEXPIRE', events, log_ttl)
end

-- Whether a conversation whose items have so many bytes has lost its items or their order: servers that evict drop keys one
-- by one. Nothing is read from what is left, and nothing added.
local function is_damaged(keys, bytes)
  return tonumber(bytes or '0') > 0 and redis.call('EXISTS', keys[2], keys[3]) < 2
end

-- Adds items to a conversation, which create, add and commit do; put_items.lua has its form. The items are three
-- arguments each, id, bytes and value, in ARGV from `from` to `to`.
-- Returns ok, or again if it was applied before
local function put_items(keys, how, token, ttl, bytes_max, object, tokens_max, from, to)
  -- A token has a fixed length, and there is one space between two.
  local function remembered(tokens)
    local all = token .. (tokens and ' ' .. tokens or '')
    return string.sub(all, 1, tonumber(tokens_max) * (#token + 1) - 1)
  end
  local v = redis.call('HMGET', keys[1], 'v', 'tk', 'la', 'lc', 'lk', 'by', 'nx')
  if is_newer(v[1]) then
    return {'newer', v[1]}
  end
  if how == 'create' then
    if v[1] then
      return {v[2] == token and 'again' or 'exists'}
    end
  elseif not v[1] then
    return {'gone'}
  elseif is_damaged(keys, v[6]) then
    return {'damaged'}
  elseif string.find(how == 'add' and v[3] or how == 'commit' and v[4] or '', token, 1, true) then
    return {'again'}
  elseif how == 'commit' and v[5] ~= token then
    return {'unlocked'}
  end
  local bytes = tonumber(v[6] or '0')
  local seen = {}
  for at = from, to, 3 do
    if seen[ARGV[at]] or redis.call('HEXISTS', keys[2], 'i:' .. ARGV[at]) == 1 then
      return {'taken', ARGV[at]}
    end
    seen[ARGV[at]] = true
    bytes = bytes + tonumber(ARGV[at + 1])
  end
  if bytes > tonumber(bytes_max) then
    return {'too_large', tostring(bytes)}
  end
  local position = tonumber(v[7] or '0')
  for at = from, to, 3 do
    redis.call('HSET', keys[2], 'i:' .. ARGV[at], ARGV[at + 1] .. ':' .. ARGV[at + 2])
    redis.call('ZADD', keys[3], position, ARGV[at])
    position = position + 1
  end
  redis.call('HSET', keys[1], 'by', string.format('%.0f', bytes), 'nx', position)
  if how == 'create' then
    redis.call('HSET', keys[1], 'v', VERSION, 'tk', token, 'ob', object)
  elseif how == 'add' then
    redis.call('HSET', keys[1], 'la', remembered(v[3]))
  else
    redis.call('HSET', keys[1], 'lc', remembered(v[4]))
    redis.call('HDEL', keys[1], 'lk', 'lu')
  end
  for _, key in ipairs(keys) do
    expire(key, ttl)
  end
  return {'ok'}
end
