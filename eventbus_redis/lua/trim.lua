-- KEYS main, services, guard. ARGV: guard ms, most entries to remove at once. Removes what every group has
-- finished, and writes down for each service up to where that is.
-- Answers 0 if somebody has just done it; else: removed, length, then service, finished up to, unread, pending.
if not redis.call('SET', KEYS[3], '1', 'NX', 'PX', ARGV[1]) or not exists(KEYS[1]) then return 0 end
local stream = map(redis.call('XINFO', 'STREAM', KEYS[1]))
local answer, lowest, lowest_ms, lowest_seq = {0, stream['length']}, nil, nil, nil

local function below(id)
  local ms, seq = string.match(id, '(%d+)-(%d+)')
  ms, seq = tonumber(ms), tonumber(seq)
  if not lowest or ms < lowest_ms or (ms == lowest_ms and seq < lowest_seq) then
    lowest, lowest_ms, lowest_seq = id, ms, seq
  end
end

local function before(id)
  local ms, seq = string.match(id, '(%d+)-(%d+)')
  if seq ~= '0' then return ms .. '-' .. string.format('%.0f', seq - 1) end
  return string.format('%.0f', ms - 1) .. '-18446744073709551615'
end

local found = groups(KEYS[1])
for name, group in pairs(found) do
  local done = group['last-delivered-id']
  if group['pending'] > 0 then done = before(redis.call('XPENDING', KEYS[1], name)[2]) end
  below(done)
  if redis.call('HEXISTS', KEYS[2], name) == 1 then redis.call('HSET', KEYS[2], name, done) end
  local read = group['entries-read']
  if group['last-delivered-id'] == stream['last-generated-id'] and read ~= stream['entries-added'] then
    -- The server loses count in a restart from its AOF; where a group has read everything the true figure is known.
    read = stream['entries-added']
    redis.call('XGROUP', 'SETID', KEYS[1], name, group['last-delivered-id'], 'ENTRIESREAD', read)
  end
  answer[#answer + 1] = name
  answer[#answer + 1] = done
  answer[#answer + 1] = read and (stream['entries-added'] - read) or -1
  answer[#answer + 1] = group['pending']
end
local services = redis.call('HGETALL', KEYS[2])
for i = 1, #services, 2 do
  -- A service whose group is missing will make it again from here: keep what it has not finished.
  if not string.match(services[i], '^[@!]') and not found[services[i]] then below(services[i + 1]) end
end
if lowest then
  answer[1] = redis.call('XTRIM', KEYS[1], 'MINID', '~', lowest, 'LIMIT', ARGV[2])
end
return answer
