-- Begins every script: what they share. Each script touches the keys that it is given and no others,
-- all of one slot, and answers with an array of texts, the first of which says what came of it.
--
-- A response is one hash:
--   v  version of the record         st status            tk token of its creation
--   in, re, ou, cu, rq               input, response, output, cut table, request: packed values
--   il, ol  bytes of input, output   hi hint              pa, pb past: own parts of ids, bytes
-- and, in the background only:
--   bg 1    own owner, or empty      ep epoch             at attempts      sm streams
--   rt retention (s, e)              sq last event, or -1 lb bytes of log  lx log overflowed
--   ft token of its end              was status before a cancel            am amended
-- A value too large for one field is the text `c<nonce>:<count>`, and lies in the fields
-- `<name>:<nonce>:<n>`, which were written before it. Its log is a stream: entry <last + 1>-0 holds the
-- events `f` to last, encoded as `b`.
--
-- The version rises when an older release could not leave the record whole. A script that meets a
-- newer one does nothing.
local VERSION = 1

local function is_newer(v)
  return v and tonumber(v) > VERSION
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

-- Keeps a response that others continue for as long as what continues it, and a tenth longer, so that a
-- chain in use is written to once in a tenth of that time and not with each turn. A Redis that takes no
-- writes may still be read.
local function renew(key, ttl_ms)
  local ttl, left = tonumber(ttl_ms), redis.call('PTTL', key)
  if left >= 0 and ttl == 0 then
    redis.pcall('PERSIST', key)
  elseif left >= 0 and left < ttl then
    redis.pcall('PEXPIRE', key, string.format('%.0f', ttl * 1.1))
  end
end

-- A value, put together if it lies in pieces. False if it is not there, or a piece is not.
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

-- Drops the pieces of a value that is about to be replaced.
local function drop_pieces(key, name)
  local found = redis.call('HGET', key, name)
  if found and string.sub(found, 1, 1) == 'c' then
    local nonce, count = string.match(found, '^c(%x+):(%d+)$')
    for piece = 0, tonumber(count) - 1 do
      redis.call('HDEL', key, name .. ':' .. nonce .. ':' .. piece)
    end
  end
end

-- Why this owner may not write to a response that runs; nothing if it may.
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
  if v.own ~= v.by_owner or v.ep ~= v.by_epoch then
    return {'fenced'}
  end
  if not runs(v.st) then
    return {'terminal', v.st}
  end
end

local function load(key, owner, epoch)
  local v = redis.call('HMGET', key, 'v', 'st', 'bg', 'own', 'ep', 'sq', 'lb', 'lx', 'ft', 'rt', 'am')
  return {
    v = v[1], st = v[2], bg = v[3], own = v[4], ep = v[5], sq = tonumber(v[6] or '-1'),
    lb = tonumber(v[7] or '0'), lx = v[8], ft = v[9], rt = v[10], am = v[11],
    by_owner = owner, by_epoch = epoch,
  }
end

-- Puts events at the end of the log. Answers with what stands against it, or nothing.
local function misfit(v, first, last)
  if first == v.sq + 1 and last >= first then
    return nil
  end
  if last <= v.sq then
    return {'duplicate', tostring(v.sq)}
  end
  return {'gap', tostring(v.sq)}
end

local function log(v, rec, events, first, last, batch, bytes_max)
  v.sq = last
  v.lb = v.lb + #batch
  if v.lx or v.lb > bytes_max then
    redis.call('UNLINK', events)
    redis.call('HSET', rec, 'sq', last, 'lb', 0, 'lx', '1')
    v.lx = '1'
    return
  end
  redis.call('XADD', events, string.format('%.0f-0', last + 1), 'f', string.format('%.0f', first), 'b', batch)
  redis.call('HSET', rec, 'sq', string.format('%.0f', last), 'lb', v.lb)
end

-- What all ends have in common. `ttl` of one that is stored, `brief` of one for polling only.
local function finish(v, rec, events, status, token, ttl, brief, log_ttl)
  redis.call('HSET', rec, 'st', status, 'ft', token)
  drop_pieces(rec, 'rq')
  redis.call('HDEL', rec, 'rq')
  expire(rec, v.rt == 'e' and brief or ttl)
  redis.call('PEXPIRE', events, log_ttl)
end
