-- KEYS main, services, queue, retry, payload, notes, reader, turns, their number, dlq, ids, waiting, owners, tallies.
-- ARGV: service.
-- Answers how many messages it still has (a hundred unread and more are not told apart); 0: done; -1: it is not subscribed.
local service = ARGV[1]
if redis.call('HEXISTS', KEYS[2], service) == 0 then return -1 end
local left = redis.call('XLEN', KEYS[3]) + redis.call('ZCARD', KEYS[4]) + redis.call('XLEN', KEYS[10])
left = left + (redis.call('GET', KEYS[9]) or 0)
local group = groups(KEYS[1])[service]
if group then
  left = left + group['pending']
  left = left + #redis.call('XRANGE', KEYS[1], '(' .. group['last-delivered-id'], '+', 'COUNT', 100)
end
if left > 0 then return left end
if group then redis.call('XGROUP', 'DESTROY', KEYS[1], service) end
redis.call('HDEL', KEYS[2], service)
redis.call('HINCRBY', KEYS[2], '@', -1)
redis.call('HSET', KEYS[2], '!' .. service, '1')
for i = 3, #KEYS do redis.call('DEL', KEYS[i]) end
return 0
