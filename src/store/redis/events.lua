-- Reads the events after a number, and the status at that moment.
-- KEYS record, log; ARGV number or '', maximum bytes, '1' for tokens
-- Returns whole, overflowed (events after the number were dropped) or sealed (dropped or expired, and the response has
-- ended); status; last number; delta table; fencing number; then first, last and batch of each entry, and its
-- tokens if they were asked for
local v = load(KEYS[1])
if not v.st or v.bg ~= '1' then
  return {'gone'}
end
if is_newer(v.v) then
  return {'newer', v.v}
end
local last = tostring(v.sq)
if v.sq == -1 then
  return {'whole', v.st, last, '', v.ep}
end
local kept_from
if redis.call('EXISTS', KEYS[2]) == 1 then
  local oldest = v.lx and redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)
  if not v.lx then
    kept_from = 0
  elseif oldest[1] then
    kept_from = tonumber(oldest[1][2][2])
  end
end
local wanted = ARGV[1] == '' and 0 or tonumber(ARGV[1]) + 1
if not kept_from or kept_from > wanted then
  local cut = not runs(v.st) and value(KEYS[1], 'cu', redis.call('HGET', KEYS[1], 'cu'))
  if not cut then
    return {'overflowed', v.st, last, '', v.ep}
  end
  return {'sealed', v.st, last, cut, v.ep}
end
local found = {'whole', v.st, last, '', v.ep}
local from = ARGV[1] == '' and '-' or string.format('(%.0f-0', tonumber(ARGV[1]) + 1)
local bytes = 0
while bytes < tonumber(ARGV[2]) or #found == 5 do
  local entries = redis.call('XRANGE', KEYS[2], from, '+', 'COUNT', 32)
  for _, entry in ipairs(entries) do
    local fields = entry[2]
    local tokens = ARGV[3] == '1' and (fields[6] or '')
    local size = #fields[4] + #(tokens or '')
    if bytes > 0 and bytes + size > tonumber(ARGV[2]) then
      return found
    end
    bytes = bytes + math.max(size, 1)
    found[#found + 1] = fields[2]
    found[#found + 1] = string.format('%.0f', tonumber(string.match(entry[1], '^%d+')) - 1)
    found[#found + 1] = fields[4]
    if tokens then
      found[#found + 1] = tokens
    end
    from = '(' .. entry[1]
  end
  if #entries < 32 then
    return found
  end
end
return found
