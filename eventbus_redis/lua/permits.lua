-- KEYS rate. ARGV: limit, period ms, wanted, slots of a period. The slot that begins before the period still counts
-- whole, so that there are never more than the limit in any period. Answers how many, or in how many ms to ask again.
local limit, period, wanted, slots = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_ms()
local grain = math.max(1, period / slots)
local slot = math.floor(now / grain)
local used, oldest = 0, nil
local found = redis.call('HGETALL', KEYS[1])
for i = 1, #found, 2 do
  local number = tonumber(found[i])
  if number < slot - slots then
    redis.call('HDEL', KEYS[1], found[i])
  else
    used = used + tonumber(found[i + 1])
    if not oldest or number < oldest then oldest = number end
  end
end
local granted = math.max(0, math.min(wanted, limit - used))
if granted > 0 then
  redis.call('HINCRBY', KEYS[1], string.format('%.0f', slot), granted)
  redis.call('PEXPIRE', KEYS[1], math.ceil(period * 2))
  return {granted, 0}
end
return {0, math.max(1, math.ceil((oldest + slots + 1) * grain - now))}
