-- KEYS dlq, tally of reasons, tally asked for. What is counted there, flat; or nothing if the index does not account for
-- every letter: somebody added or deleted letters by hand. Every letter has one reason.
local letters = 0
for _, count in ipairs(redis.call('HVALS', KEYS[2])) do letters = letters + count end
if letters ~= redis.call('XLEN', KEYS[1]) then return nil end
return redis.call('HGETALL', KEYS[3])
