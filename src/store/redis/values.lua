-- Reads whole values of some responses. ARGV names of fields; the answer has them for each key, or
-- false where there is no such response.
local found = {}
for place, key in ipairs(KEYS) do
  local v = redis.call('HMGET', key, 'st', 'v')
  if not v[1] then
    found[place] = false
  elseif is_newer(v[2]) then
    return redis.error_reply('NEWER ' .. v[2])
  else
    local values = {}
    for number, name in ipairs(ARGV) do
      values[number] = value(key, name, redis.call('HGET', key, name))
    end
    found[place] = values
  end
end
return found
