-- KEYS stream... ARGV: service, idle ms. Forgets consumers that hold nothing and have not been seen for long.
local removed = 0
for _, key in ipairs(KEYS) do
  if groups(key)[ARGV[1]] then
    for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', key, ARGV[1])) do
      local consumer = map(flat)
      if consumer['pending'] == 0 and consumer['idle'] > tonumber(ARGV[2]) then
        redis.call('XGROUP', 'DELCONSUMER', key, ARGV[1], consumer['name'])
        removed = removed + 1
      end
    end
  end
end
return removed
