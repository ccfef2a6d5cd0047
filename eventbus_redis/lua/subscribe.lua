-- KEYS main, services, queue. ARGV: service, "create" or "heal".
-- The services hash holds, for each service, the id up to which all is finished; '@' the number of services; and
-- '!name' one that left by intent. A running service that finds neither is on a server that was wiped: whatever
-- stands in the stream came after that, and all of it is its own.
local service = ARGV[1]
local stored = redis.call('HGET', KEYS[2], service)
local known = stored
if not stored and ARGV[2] == 'heal' then
  if redis.call('HEXISTS', KEYS[2], '!' .. service) == 1 then return 'unknown' end
  stored = '0-0'
end
local found = groups(KEYS[1])[service]
local made = 'there'
if not found then
  local stream = exists(KEYS[1]) and map(redis.call('XINFO', 'STREAM', KEYS[1])) or nil
  local last = stream and stream['last-generated-id'] or '0-0'
  if not stored then
    stored = last
    redis.call('XGROUP', 'CREATE', KEYS[1], service, last, 'MKSTREAM', 'ENTRIESREAD', stream and stream['entries-added'] or 0)
    made = 'made'
  else
    local ms, seq = string.match(stored, '(%d+)-(%d+)')
    local last_ms, last_seq = string.match(last, '(%d+)-(%d+)')
    if tonumber(ms) > tonumber(last_ms) or (ms == last_ms and tonumber(seq) > tonumber(last_seq)) then
      stored = '0-0'  -- a stream that has not come so far is a new one: all of it is unread
    end
    redis.call('XGROUP', 'CREATE', KEYS[1], service, stored, 'MKSTREAM')
    made = 'healed'
  end
elseif not stored then
  stored = found['last-delivered-id']
end
if not known then
  redis.call('HINCRBY', KEYS[2], '@', 1)
  redis.call('HDEL', KEYS[2], '!' .. service)
end
redis.call('HSET', KEYS[2], service, stored)
if not groups(KEYS[3])[service] then
  redis.call('XGROUP', 'CREATE', KEYS[3], service, '0', 'MKSTREAM')
  if made == 'there' then made = 'healed' end
end
return made
