-- Lists the owners and how long ago, in ms by this server's clock, each was seen alive (-1: it has left).
-- KEYS owners; ARGV owner, or '' for all
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local found = {}
local function add(owner, seen)
  found[#found + 1] = owner
  local ago = seen > 0 and math.max(now - seen, 0) * 1000 or -1
  found[#found + 1] = string.format('%.0f', ago)
end
if ARGV[1] ~= '' then
  local seen = redis.call('ZSCORE', KEYS[1], ARGV[1])
  if seen then
    add(ARGV[1], tonumber(seen))
  end
  return found
end
local all = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for at = 1, #all, 2 do
  add(all[at], tonumber(all[at + 1]))
end
return found
