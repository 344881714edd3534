-- Cancels a background response that still runs, and appends its terminal event.
-- KEYS record, log; ARGV token, TTL, TTL of ephemeral responses, TTL of the log (ms), maximum bytes of a log,
-- event, response, and `wh` of the record if there is one
-- Returns ok, former status, owner, and 1 if output is to be stored that readers received
local v = load(KEYS[1])
if not v.st then
  return {'gone'}
end
if is_newer(v.v) then
  return {'newer', v.v}
end
if v.bg ~= '1' then
  return {'not_background'}
end
if v.ft == ARGV[1] then
  local w = redis.call('HMGET', KEYS[1], 'was', 'po')
  return {'ok', w[1] or 'queued', v.own, w[2] or ''}
end
if not runs(v.st) then
  return {'terminal', v.st}
end
-- A server that is out of memory refuses a script's first write if that may need memory, and no later one. A cancel frees
-- the request, and a worker. No response that runs has this field.
redis.call('HDEL', KEYS[1], 'po')
local number = v.sq + 1
local has_output = number > 0 and not v.lx and redis.call('HGET', KEYS[1], 'sm') == '1'
log(v, KEYS[1], KEYS[2], number, number, ARGV[6], tonumber(ARGV[5]))
drop_pieces(KEYS[1], 're')
redis.call('HSET', KEYS[1], 'was', v.st, 're', ARGV[7])
if ARGV[8] then
  redis.call('HSET', KEYS[1], 'wh', ARGV[8])
end
if has_output and not v.lx then
  redis.call('HSET', KEYS[1], 'po', '1')
else
  has_output = false
  drop_request(KEYS[1])
end
finish(v, KEYS[1], KEYS[2], 'cancelled', ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return {'ok', v.st, v.own, has_output and '1' or ''}
