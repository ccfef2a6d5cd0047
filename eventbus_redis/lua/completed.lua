-- KEYS the beginning of the names. ARGV: owner, window ms, claim ms; number of completed, names; number let go, names;
-- then the names asked for. A name's key holds '.' when it is completed, or who has claimed it.
-- Answers 0 new, 1 completed, 2 claimed, one for each name asked for.
local owner, window, claim = ARGV[1], ARGV[2], tonumber(ARGV[3])
local base, at = KEYS[1] .. ':', 4
local count = tonumber(ARGV[at])
for i = at + 1, at + count do redis.call('SET', base .. ARGV[i], '.', 'PX', window) end
at = at + count + 1
count = tonumber(ARGV[at])
for i = at + 1, at + count do
  if redis.call('GET', base .. ARGV[i]) == owner then redis.call('DEL', base .. ARGV[i]) end
end
at = at + count + 1
local answers = {}
for i = at, #ARGV do
  local found = redis.call('GET', base .. ARGV[i])
  if found == '.' then
    answers[#answers + 1] = 1
  elseif found then
    answers[#answers + 1] = 2
  else
    if claim > 0 then redis.call('SET', base .. ARGV[i], owner, 'PX', claim) end
    answers[#answers + 1] = 0
  end
end
return answers
