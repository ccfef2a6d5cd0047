-- KEYS main, queue. ARGV: service, consumer; number of ids in main, ids; number of ids in queue, ids.
-- Renews the leases of what is still ours; answers the positions of what is not.
-- A plain XCLAIM would steal it back from whoever took over.
local service, consumer = ARGV[1], ARGV[2]
local lost, at, position = {}, 3, 0
for source = 1, 2 do
  local count, mine = tonumber(ARGV[at]), {}
  local held = all_mine(KEYS[source], service, consumer, ARGV, at + 1, at + count)
  for i = at + 1, at + count do
    position = position + 1
    if held[ARGV[i]] then mine[#mine + 1] = ARGV[i] else lost[#lost + 1] = position end
  end
  for from = 1, #mine, 2000 do
    local ids = {unpack(mine, from, math.min(from + 1999, #mine))}
    ids[#ids + 1] = 'JUSTID'
    redis.call('XCLAIM', KEYS[source], service, consumer, 0, unpack(ids))
  end
  at = at + count + 1
end
return lost
