-- KEYS main, queue. ARGV: service, consumer. All that a closing consumer holds can be claimed at once: it passes to
-- a consumer of nobody with an age beyond every lease, so that a late settle of the closed one is `lost`.
local service, consumer, freed = ARGV[1], ARGV[2], 0
for source = 1, 2 do
  if groups(KEYS[source])[service] then
    while true do
      local ids = {}
      for _, row in ipairs(redis.call('XPENDING', KEYS[source], service, '-', '+', 1000, consumer)) do
        ids[#ids + 1] = row[1]
      end
      if #ids == 0 then break end
      freed = freed + #ids
      for _, word in ipairs({'IDLE', '31536000000', 'JUSTID'}) do ids[#ids + 1] = word end
      redis.call('XCLAIM', KEYS[source], service, '@closed', 0, unpack(ids))
    end
    redis.call('XGROUP', 'DELCONSUMER', KEYS[source], service, consumer)
  end
end
return freed
