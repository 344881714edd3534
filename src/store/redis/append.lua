-- Appends events to the log.
-- KEYS record, log; ARGV owner, fencing number, first, last, batch, maximum bytes of a log, tokens ('' for none)
local v = load(KEYS[1], ARGV[1], ARGV[2])
local refused = refusal(v)
if refused then
  return refused
end
local first, last = tonumber(ARGV[3]), tonumber(ARGV[4])
refused = sequence_mismatch(v, first, last)
if refused then
  return refused
end
log(v, KEYS[1], KEYS[2], first, last, ARGV[5], tonumber(ARGV[6]), ARGV[7])
if v.lx then
  return {'overflow'}
end
return {'ok'}
