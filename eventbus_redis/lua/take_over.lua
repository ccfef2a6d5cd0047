-- KEYS stream, notes, reader. ARGV: service, consumer, lease ms, how many, m|q. What a former reader has left, oldest
-- first, before anything new is read. Answers entries, notes, whether each was handed back in good order ('1'), and
-- what is left: 0 nothing, 1 more, 2 some that are not ours yet, because their lease still runs.
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return {{}, {}, {}, 2} end
local entries, notes, released, left = {}, {}, {}, 0
local from = '-'
while #entries < tonumber(ARGV[4]) do
  local rows = redis.call('XPENDING', KEYS[1], ARGV[1], from, '+', 100)
  for _, pending in ipairs(rows) do
    local id, owner = pending[1], pending[2]
    from = '(' .. id
    if owner ~= ARGV[2] then
      if #entries >= tonumber(ARGV[4]) then left = 1 break end
      if owner ~= '@closed' and owner ~= '@released' and pending[3] < tonumber(ARGV[3]) then left = 2 break end
      local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id)[1]
      if entry then
        entries[#entries + 1] = entry
        notes[#notes + 1] = redis.call('HGET', KEYS[2], ARGV[5] .. id)
        released[#released + 1] = owner == '@released' and '1' or '0'
      end
    end
  end
  if left > 0 or #rows < 100 then break end
end
return {entries, notes, released, left}
