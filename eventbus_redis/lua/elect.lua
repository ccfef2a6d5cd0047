-- KEYS reader. ARGV: consumer, lease ms (0: step back). The one reader of a service that keeps the order of keys.
-- Answers 0: somebody else is; 1: we are, newly; 2: we are, as before.
local reader = redis.call('GET', KEYS[1])
if ARGV[2] == '0' then
  if reader == ARGV[1] then redis.call('DEL', KEYS[1]) end
  return 0
end
if reader and reader ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return reader and 2 or 1
