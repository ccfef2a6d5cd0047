-- KEYS dlq. ARGV: ids. The letters that stand there.
local found = {}
for _, id in ipairs(ARGV) do found[#found + 1] = redis.call('XRANGE', KEYS[1], id, id)[1] end
return found
