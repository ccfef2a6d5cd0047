-- KEYS main, services. ARGV: store even without services, then per event: number of fields and values, and they.
-- Answers the number of services; 0: none (any more); -1: there never was one here. Nothing is stored for nobody.
local known = tonumber(redis.call('HGET', KEYS[2], '@') or -1)
if known == 0 or (known < 0 and ARGV[1] == '0') then return known end
local i, last = 2, #ARGV
while i <= last do
  local count = tonumber(ARGV[i])
  redis.call('XADD', KEYS[1], '*', unpack(ARGV, i + 1, i + count))
  i = i + count + 1
end
return known
