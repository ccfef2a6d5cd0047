-- KEYS reader. ARGV: consumer, lease ms (0: step back). The one reader of a service that keeps the order of keys.
-- Answers 1 if that is us.
local reader = redis.call('GET', KEYS[1])
if ARGV[2] == '0' then
  if reader == ARGV[1] then redis.call('DEL', KEYS[1]) end
  return 0
end
if reader and reader ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
