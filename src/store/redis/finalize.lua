-- Ends a response, unless it has ended: status, content, delta table and last events; and commits its items to the
-- conversation that it has locked.
-- KEYS record, log, and those of the conversation; ARGV owner, fencing number, token, status, TTL, TTL of ephemeral responses, TTL of the log (ms),
-- maximum bytes of a log, first, last, batch (first '' for none), number of items ('' for no conversation; else
-- followed by token of the lock, TTL and maximum bytes of a conversation, how many tokens are remembered, and id, bytes
-- and value of each item), then fields and values
-- Returns ok and the outcome of the commit; not_added and its outcome if the conversation does not accept the items,
-- and then nothing is written
local v = load(KEYS[1], ARGV[1], ARGV[2])
if v.st and v.ft == ARGV[3] and not is_newer(v.v) then
  return {'ok', 'again'}
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
end
local fields_at, put = 13, {'ok'}
if ARGV[12] ~= '' then
  fields_at = 17 + 3 * tonumber(ARGV[12])
  put = put_items({KEYS[3], KEYS[4], KEYS[5]}, 'commit', ARGV[13], ARGV[14], ARGV[15], '', ARGV[16], 17, fields_at - 1)
  if put[1] == 'newer' then
    return put
  end
  if put[1] ~= 'ok' and put[1] ~= 'again' then
    return {'not_added', put[1]}
  end
end
if ARGV[9] ~= '' then
  log(v, KEYS[1], KEYS[2], tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11], tonumber(ARGV[8]))
end
drop_pieces(KEYS[1], 're')
drop_pieces(KEYS[1], 'ou')
redis.call('HSET', KEYS[1], unpack(ARGV, fields_at))
drop_request(KEYS[1])
finish(v, KEYS[1], KEYS[2], ARGV[4], ARGV[3], ARGV[5], ARGV[6], ARGV[7])
return {'ok', put[1]}
