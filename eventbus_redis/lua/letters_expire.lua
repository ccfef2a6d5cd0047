-- KEYS dlq, ids, waiting, owners, tallies. ARGV: most age in ms (-1: any), most letters (-1: any), how many at once.
-- Oldest first. Answers how many were too old, and how many too many.
local old, many, room, gone = 0, 0, tonumber(ARGV[3]), {}
local surplus = tonumber(ARGV[2]) < 0 and 0 or math.max(0, redis.call('XLEN', KEYS[1]) - tonumber(ARGV[2]))
local limit = tonumber(ARGV[1]) < 0 and -1 or now_ms() - tonumber(ARGV[1])
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if not first or (surplus == 0 and tonumber(string.match(first[1], '%d+')) >= limit) then return {0, 0} end
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', room)) do
  if tonumber(string.match(entry[1], '%d+')) < limit then old = old + 1
  elseif old + many < surplus then many = many + 1
  else break end
  gone[#gone + 1] = listed(entry)
end
if #gone > 0 then remove_letters(1, gone) end
return {old, many}
