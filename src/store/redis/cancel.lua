-- Cancels a background response that still runs, and appends its terminal event.
-- KEYS record, log; ARGV token, TTL, TTL of ephemeral responses, TTL of the log (ms), maximum bytes of a log,
-- event, response
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
  return {'ok', redis.call('HGET', KEYS[1], 'was') or 'queued', v.own}
end
if not runs(v.st) then
  return {'terminal', v.st}
end
local number = v.sq + 1
log(v, KEYS[1], KEYS[2], number, number, ARGV[6], tonumber(ARGV[5]))
drop_pieces(KEYS[1], 're')
redis.call('HSET', KEYS[1], 'was', v.st, 're', ARGV[7])
finish(v, KEYS[1], KEYS[2], 'cancelled', ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return {'ok', v.st, v.own}
