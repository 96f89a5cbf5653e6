"""Lua scripts of the store of responses: each is one step for Redis, whoever else writes.

Keys of a wrong type are garbage: read as none, overwritten. Each step of a loop removes something,
so none runs for ever, whatever Redis has.
"""

from __future__ import annotations

# Functions of both scripts that change the sums.
_SUMS = """
local function held(whose)
  local sum = redis.pcall('HGET', sums, whose)
  return type(sum) == 'string' and tonumber(sum) or 0
end
local function change(whose, bytes)
  local sum = held(whose) + bytes
  if sum > 0 and sum < 2^53 then
    redis.call('HSET', sums, whose, string.format('%.0f', sum))
  else
    redis.call('HDEL', sums, whose)
  end
end
"""

# Store a value. Where there is no room, the oldest values of whoever has most bytes with the new
# value are removed, or those of its holder where that one's bound is reached. Returns whether it is
# stored.
# KEYS: hash of sums. ARGV: prefix of values, of sets, id, value, TTL in ms, bound in bytes, holder,
# its bound.
PUT = (
    """
local sums, prefix, sets, id, value = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ttl, bound, holder, most = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if #value > bound or #value > most then return 0 end
for key, kind in pairs({[sums] = 'hash', [sets .. holder] = 'zset'}) do
  if redis.call('TYPE', key).ok ~= kind then redis.call('DEL', key) end
end
"""
    + _SUMS
    + """
local function remove(whose, size)
  size = math.min(size, held(whose))
  change(whose, -size)
  change('', -size)
end
local function drop(whose, before)
  local key = sets .. whose
  local first = redis.pcall('ZRANGE', key, 0, 0, 'WITHSCORES')
  if not first[1] then
    redis.call('DEL', key)
    remove(whose, held(whose))
    return false
  end
  if before and tonumber(first[2]) > before then return false end
  redis.call('ZREM', key, first[1])
  local name, size = string.match(first[1], '^(%S+) (%d+)$')
  if name then
    redis.call('DEL', prefix .. name)
    remove(whose, tonumber(size))
  end
  return true
end
local function holders()
  local found, fields = {}, redis.call('HGETALL', sums)
  for n = 1, #fields, 2 do
    local whose, bytes = fields[n], tonumber(fields[n + 1])
    if whose ~= '' and bytes and bytes > 0 and bytes <= bound then
      found[whose] = bytes
    elseif whose ~= '' then
      redis.call('HDEL', sums, whose)
    end
  end
  return found
end
local function sum_all()
  redis.call('HDEL', sums, '')
  for _, bytes in pairs(holders()) do change('', bytes) end
end
if not (held('') > 0 and held('') <= bound and held(holder) >= 0 and held(holder) <= bound) then
  sum_all()
end
if held(holder) == 0 then -- Redis may remove any key where its memory is full
  for _, member in ipairs(redis.call('ZRANGE', sets .. holder, 0, -1)) do
    local name, size = string.match(member, '^(%S+) (%d+)$')
    if name and tonumber(size) <= bound then
      change(holder, tonumber(size))
      change('', tonumber(size))
    else
      redis.call('ZREM', sets .. holder, member)
    end
  end
end
while drop(holder, now) do end
while held(holder) + #value > most and drop(holder) do end
if held('') + #value > bound then
  for whose in pairs(holders()) do
    while drop(whose, now) do end
  end
  sum_all()
end
while held('') + #value > bound do
  local largest, size = nil, 0
  for whose, bytes in pairs(holders()) do
    if whose == holder then bytes = bytes + #value end
    if bytes > size then largest, size = whose, bytes end
  end
  if not largest then sum_all() break end
  while held('') + #value > bound and drop(largest) do end
end
redis.call('SET', prefix .. id, value, 'PX', ttl)
redis.call('ZADD', sets .. holder, now + ttl, id .. ' ' .. #value)
change(holder, #value)
change('', #value)
redis.call('PEXPIRE', sums, ttl)
redis.call('PEXPIRE', sets .. holder, ttl)
return 1
"""
)

# Return a value up to a bound; for a value of a wrong type, a text without a seal.
# KEYS: the value. ARGV: place of the last byte.
GET = """
local value = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[1])
return type(value) == 'string' and value or 'of a wrong type'
"""

# Remove a value. KEYS: hash of sums. ARGV: prefix of values, of sets, id, holder.
REMOVE = (
    """
local sums, key, whose = KEYS[1], ARGV[1] .. ARGV[3], ARGV[4]
"""
    + _SUMS
    + """
local size = redis.pcall('STRLEN', key)
if redis.call('DEL', key) == 1 and type(size) == 'number' and
   redis.pcall('ZREM', ARGV[2] .. whose, ARGV[3] .. ' ' .. size) == 1 and held(whose) >= size then
  change(whose, -size)
  change('', -size)
end
return 1
"""
)
