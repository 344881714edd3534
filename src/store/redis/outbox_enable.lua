-- Takes events for an endpoint again, whichever of its fingerprints was disabled.
-- KEYS ho and hu as in outbox_add.lua
-- Returns 1, or 0 if it took events all along
local enabled = redis.call('DEL', KEYS[1])
for _, former in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(0')) do
  -- No newer than it was: below each that is not disabled.
  redis.call('ZADD', KEYS[2], '0', former)
  enabled = 1
end
return {tostring(enabled)}
