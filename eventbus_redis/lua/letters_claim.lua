-- KEYS dlq, waiting, owners. ARGV: consumer, how many, lease ms. Letters that nobody reads now and that do not wait:
-- first those whose time has come (a lease over, a wait over), then those never read.
local now, found = now_ms(), {}
local until_ms = string.format('%.0f', now + tonumber(ARGV[3]))

local function give(entry)
  redis.call('ZADD', KEYS[2], until_ms, entry[1])
  redis.call('HSET', KEYS[3], entry[1], ARGV[1])
  found[#found + 1] = entry
end

local limit = tonumber(ARGV[2])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now), 'LIMIT', 0, limit)) do
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  if entry then give(entry) else
    redis.call('ZREM', KEYS[2], id)
    redis.call('HDEL', KEYS[3], id)
  end
end
if #found < limit then
  local last = redis.call('HGET', KEYS[3], '@last') or '0-0'
  local fresh = redis.call('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', limit - #found)
  for _, entry in ipairs(fresh) do give(entry) end
  if #fresh > 0 then redis.call('HSET', KEYS[3], '@last', fresh[#fresh][1]) end
end
return found
