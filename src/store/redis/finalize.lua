-- Ends a response, unless it has ended: status, content, delta table and last events.
-- KEYS record, log; ARGV owner, fencing number, token, status, TTL, TTL of ephemeral responses, TTL of the log (ms),
-- maximum bytes of a log, first, last, batch (first '' for none), then fields and values
local v = load(KEYS[1], ARGV[1], ARGV[2])
if v.st and v.ft == ARGV[3] and not is_newer(v.v) then
  return {'ok'}
end
local refused = refusal(v)
if refused then
  return refused
end
if ARGV[9] ~= '' then
  local first, last = tonumber(ARGV[9]), tonumber(ARGV[10])
  refused = sequence_mismatch(v, first, last)
  if refused then
    return refused
  end
  log(v, KEYS[1], KEYS[2], first, last, ARGV[11], tonumber(ARGV[8]))
end
drop_pieces(KEYS[1], 're')
drop_pieces(KEYS[1], 'ou')
redis.call('HSET', KEYS[1], unpack(ARGV, 12))
drop_request(KEYS[1])
finish(v, KEYS[1], KEYS[2], ARGV[4], ARGV[3], ARGV[5], ARGV[6], ARGV[7])
return {'ok'}
