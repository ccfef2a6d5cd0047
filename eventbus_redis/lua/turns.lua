#!lua flags=allow-oom
-- KEYS main, queue, turns. ARGV: service, how many to take from main, how many may stand unread in the queue, events in
-- a row; then tenant, events in a row of its own. New entries of the shared stream go to a list for each tenant, and
-- from there, by turns, to the service's own stream. Allowed with a full memory, as move.lua is.
-- turns: a row (list) of tenants that have something; beside it a list for each, and how many there are in all.
-- Answers how many were taken from main, how many still wait for their turn, and the last id read of main.
local service, step, window, in_a_row = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local row, base, total = KEYS[3], KEYS[3] .. ':', KEYS[3] .. '@'
local taken, moved = 0, 0
if step > 0 then
  local found = redis.call('XREADGROUP', 'GROUP', service, '@turns', 'COUNT', step, 'NOACK', 'STREAMS', KEYS[1], '>')
  for _, entry in ipairs(found and found[1] and found[1][2] or {}) do
    local tenant = field_of(entry[2], 'tenant') or ''
    if redis.call('RPUSH', base .. tenant, cmsgpack.pack(copy_of(entry[2], entry[1], ''))) == 1 then
      redis.call('RPUSH', row, tenant)
    end
    taken = taken + 1
  end
  if taken > 0 then redis.call('INCRBY', total, taken) end
end
if taken == step and step > 0 then return {taken, 1, '0-0'} end  -- there is more: nobody's turn before all are known
local queue = groups(KEYS[2])[service]
local room = window - redis.call('XLEN', KEYS[2]) + (queue and queue['pending'] or 0)
local turn_of = {}
for i = 5, #ARGV, 2 do turn_of[ARGV[i]] = tonumber(ARGV[i + 1]) end
while moved < room do
  local tenant = redis.call('LPOP', row)
  if not tenant then break end
  local turn = math.min(turn_of[tenant] or in_a_row, room - moved)
  local some = redis.call('LPOP', base .. tenant, turn) or {}
  for _, packed in ipairs(some) do redis.call('XADD', KEYS[2], '*', unpack(cmsgpack.unpack(packed))) end
  moved = moved + #some
  if redis.call('EXISTS', base .. tenant) == 1 then redis.call('RPUSH', row, tenant) end
end
if moved > 0 and redis.call('DECRBY', total, moved) == 0 then redis.call('DEL', total) end
local main = groups(KEYS[1])[service]
return {taken, tonumber(redis.call('GET', total) or 0), main and main['last-delivered-id'] or '0-0'}
