-- Inserts, replaces or removes a document, with its place in the list, the sums of its tenant and its due time.
-- KEYS documents of a collection, order of the tenant's, due ones of the collection; ARGV insert, replace or remove;
-- tenant; id; then
--   insert: packed value, due in ms ('' for never), created in ms, weight, fingerprint, maxima of documents and weight
--   replace: packed value, due in ms ('' for never), version
--   remove: version ('' for any)
-- A document is an entry `tenant:id` of the first key: format, version, created in ms, weight, fingerprint of the value
-- that was inserted, each with a space behind it, and the packed value. The entries `n:tenant` and `w:tenant` are how
-- many documents the tenant has and what they weigh. None of the keys expires: a document stays until it is removed.
-- The format is raised when an older release would damage a document. A document of a newer format is not changed.
local FORMAT = 1
local member, number_of, weight_of = ARGV[2] .. ':' .. ARGV[3], 'n:' .. ARGV[2], 'w:' .. ARGV[2]

local function text(number)
  return string.format('%.0f', number)
end

-- Writes the document with the value and the due time of the arguments.
local function write(version, rest)
  redis.call('HSET', KEYS[1], member, FORMAT .. ' ' .. version .. ' ' .. rest .. ARGV[4])
  if ARGV[5] ~= '' then
    redis.call('ZADD', KEYS[3], ARGV[5], member)
  else
    redis.call('ZREM', KEYS[3], member)
  end
end

local sums = redis.call('HMGET', KEYS[1], number_of, weight_of)
local documents, weight = tonumber(sums[1] or '0'), tonumber(sums[2] or '0')

local found = redis.call('HGET', KEYS[1], member)
local format = found and string.match(found, '^(%d+) ')
if found and tonumber(format) > FORMAT then
  return {'newer', format}
end
local version, rest, own_weight, fingerprint
if found then
  version, rest = string.match(found, '^%d+ (%d+) (%d+ %d+ %x+ )')
  own_weight, fingerprint = string.match(rest, '^%d+ (%d+) (%x+) $')
end

if ARGV[1] == 'insert' then
  if found then
    return {fingerprint == ARGV[8] and 'ok' or 'exists'}
  end
  if documents + 1 > tonumber(ARGV[9]) then
    return {'too_many'}
  end
  if weight + tonumber(ARGV[7]) > tonumber(ARGV[10]) then
    return {'too_heavy'}
  end
  write('1', ARGV[6] .. ' ' .. ARGV[7] .. ' ' .. ARGV[8] .. ' ')
  redis.call('ZADD', KEYS[2], ARGV[6], ARGV[3])
  redis.call('HSET', KEYS[1], number_of, text(documents + 1), weight_of, text(weight + tonumber(ARGV[7])))
  return {'ok'}
end

local expected = ARGV[1] == 'replace' and ARGV[6] or ARGV[4]
if not found then
  return {'gone'}
end
if expected ~= '' and expected ~= version then
  return {'changed'}
end
if ARGV[1] == 'replace' then
  local next_version = text(tonumber(version) + 1)
  write(next_version, rest)
  return {'ok', next_version}
end
-- A server that is out of memory does not refuse this, nor what follows it.
redis.call('HDEL', KEYS[1], member)
redis.call('ZREM', KEYS[2], ARGV[3])
redis.call('ZREM', KEYS[3], member)
if documents > 1 then
  local left = math.max(weight - tonumber(own_weight), 0)
  redis.call('HSET', KEYS[1], number_of, text(documents - 1), weight_of, text(left))
else
  redis.call('HDEL', KEYS[1], number_of, weight_of)
end
return {'ok'}
