// SPDX-License-Identifier: Apache-2.0
// What happens inside the server, in Lua: one script for everything that must be one step.
//
// Keys, all under one hash tag and so in one slot. R is a record: "s" or "p" for its kind, then its id in hex.
//   {mesa}:R             hash: head (as in store_internal.h), generation, bytes of payload and journal
//   {mesa}:R:GENERATION  hash: the payload's pieces by number; until the record names it, it ends by itself
//   {mesa}:R:journal     list: frames with their entries
//   {mesa}:R:lease       hash: holder, epoch, until; kept for a day after
//   {mesa}:wished:HOLDER set: R and the owner for whom another wants it of this holder; ends soon by itself
//   {mesa}:records:K     hash of a kind's records: "BYTES OWNER"
//   {mesa}:owner:K:OWNER sorted set: ids
//   {mesa}:expiry        sorted set: records by their time
//   {mesa}:used          sorted set: snapshots by their last use
//   {mesa}:bytes, {mesa}:stamp, {mesa}:epoch  counters
// A record's own keys end by themselves a minute after the record's time, or its lease's if that is later; the sweep
// that every client of the server runs is in time, and takes it out of the indexes.
//
// Every script but the reading ones begins by asking whether its time is over: what a server that hung comes to when
// nobody waits for it any more has no effect. An epoch is the server's time in microseconds, or one more than the last:
// also when the server forgets everything, none comes again unless its clock goes back.
#include <stdlib.h>
#include <string.h>

#include "engine/store_redis.h"

static const char prelude[] =
    "local P='{mesa}:'\n"
    "local call=redis.call\n"
    "local function text(n) return string.format('%.0f',n) end\n"
    "local function clock() local t=call('TIME') return tonumber(t[1])*1000+math.floor(tonumber(t[2])/1000) end\n"
    "local function late(at) return clock()>tonumber(at) end\n"
    "local function kind(r) return r:sub(1,1) end\n"
    "local function fenced(r,epoch) return epoch~='' and call('HGET',P..r..':lease','epoch')~=epoch end\n"
    "local function entry(r)\n"
    "  local e=call('HGET',P..'records:'..kind(r),r)\n"
    "  if not e then return nil end\n"
    "  local bytes,owner=e:match('^(%d+) (%x+)$')\n"
    "  return tonumber(bytes),owner\n"
    "end\n"
    "local function drop(r)\n"
    "  local generation=call('HGET',P..r,'generation')\n"
    "  local bytes,owner=entry(r)\n"
    "  call('DEL',P..r,P..r..':journal',P..r..':lease')\n"
    "  if generation then call('DEL',P..r..':'..generation) end\n"
    "  if bytes then\n"
    "    call('DECRBY',P..'bytes',text(bytes))\n"
    "    call('ZREM',P..'owner:'..kind(r)..':'..owner,r:sub(2))\n"
    "    call('HDEL',P..'records:'..kind(r),r)\n"
    "  end\n"
    "  call('ZREM',P..'expiry',r)\n"
    "  call('ZREM',P..'used',r)\n"
    "end\n"
    // Drops snapshots, but never r, until `grow` more bytes stay below `low`; whether they stay below `limit`.
    "local function room(r,grow,low,limit,force)\n"
    "  local evicted=0\n"
    "  if not force and grow>limit then return false,0 end\n"
    "  while true do\n"
    "    local used=tonumber(call('GET',P..'bytes') or 0)\n"
    "    if not force and used+grow<=low then return true,evicted end\n"
    "    local victim\n"
    "    for _,v in ipairs(call('ZRANGE',P..'used',0,1)) do if v~=r then victim=v break end end\n"
    "    if not victim then return not force and used+grow<=limit,evicted end\n"
    "    drop(victim)\n"
    "    evicted=evicted+1\n"
    "    force=false\n"
    "  end\n"
    "end\n"
    "local function outlast(r,generation,expires)\n"
    "  local ends=expires\n"
    "  if expires>0 then\n"
    "    ends=math.max(expires,tonumber(call('HGET',P..r..':lease','until') or 0))+60000\n"
    "  end\n"
    "  for _,key in ipairs({P..r,P..r..':journal',P..r..':'..generation}) do\n"
    "    if expires>0 then call('PEXPIREAT',key,text(ends)) else call('PERSIST',key) end\n"
    "  end\n"
    "end\n";

// ARGV: r, late, epoch, bytes that are to come, low, limit, whether a snapshot has to go in any case
static const char peek[] = "if late(ARGV[2]) then return {'late',text(clock())} end\n"
                           "if fenced(ARGV[1],ARGV[3]) then return {'fenced'} end\n"
                           "local grow,fits,evicted=tonumber(ARGV[4]),true,0\n"
                           "local force=ARGV[7]=='1'\n"
                           "if grow>0 or force then\n"
                           "  fits,evicted=room(ARGV[1],grow,tonumber(ARGV[5]),tonumber(ARGV[6]),force)\n"
                           "end\n"
                           "return {fits and 'ok' or 'full',evicted,call('HGET',P..ARGV[1],'head')}\n";

// ARGV: r, late, epoch, operation, digest of the head that is expected, head, owner, expires, low, limit,
//   put: generation, bytes of payload, pieces, position up to which the journal goes ('': all of it), pieces...
//   append: frame with entry, bytes that a journal may have
// Everything that may refuse comes before the first change.
static const char write[] =
    "local r,op=ARGV[1],ARGV[4]\n"
    "if late(ARGV[2]) then return {'late',text(clock())} end\n"
    "if fenced(r,ARGV[3]) then return {'fenced'} end\n"
    "local record,journal=P..r,P..r..':journal'\n"
    "local old=call('HMGET',record,'head','generation','journal','payload')\n"
    "if (old[1] or ''):sub(-32)~=ARGV[5] then return {'stale'} end\n"
    "local before,generation=old[2],old[2] or ''\n"
    "local held,payload=tonumber(old[3] or 0),tonumber(old[4] or 0)\n"
    "local gone=0\n"
    "if op=='put' then\n"
    "  generation=ARGV[11]\n"
    "  payload=tonumber(ARGV[12])\n"
    "  if #ARGV==14 and call('HLEN',record..':'..generation)~=tonumber(ARGV[13]) then return {'missing'} end\n"
    "  if ARGV[14]=='' then held=0\n"
    "  else\n"
    "    local e=call('LINDEX',journal,0)\n"
    "    while e and #e>=56 and struct.unpack('<i8',e,49)<=tonumber(ARGV[14]) do\n"
    "      held=held-#e\n"
    "      gone=gone+1\n"
    "      e=call('LINDEX',journal,gone)\n"
    "    end\n"
    "  end\n"
    "elseif op=='append' then\n"
    "  held=held+#ARGV[11]\n"
    "  if held>tonumber(ARGV[12]) then return {'journal'} end\n"
    "end\n"
    "local size=payload+held+1024\n"
    "local counted=entry(r)\n"
    "local new=counted==nil\n"
    "counted=counted or 0\n"
    "local fits,evicted=true,0\n"
    "if size>counted then fits,evicted=room(r,size-counted,tonumber(ARGV[9]),tonumber(ARGV[10])) end\n"
    "if not fits then return {'full',evicted} end\n"
    "if op=='put' then\n"
    "  for i=15,#ARGV do call('HSET',record..':'..generation,i-15,ARGV[i]) end\n"
    "  if before and before~='' and before~=generation then call('DEL',record..':'..before) end\n"
    "  if ARGV[14]=='' then call('DEL',journal) elseif gone>0 then call('LTRIM',journal,gone,-1) end\n"
    "elseif op=='append' then\n"
    "  call('RPUSH',journal,ARGV[11])\n"
    "end\n"
    "call('HSET',record,'head',ARGV[6],'generation',generation,'journal',text(held),'payload',text(payload))\n"
    "call('INCRBY',P..'bytes',text(size-counted))\n"
    "call('HSET',P..'records:'..kind(r),r,text(size)..' '..ARGV[7])\n"
    "if new then call('ZADD',P..'owner:'..kind(r)..':'..ARGV[7],0,r:sub(2)) end\n"
    "local expires=tonumber(ARGV[8])\n"
    "if expires>0 then call('ZADD',P..'expiry',text(expires),r) else call('ZREM',P..'expiry',r) end\n"
    "outlast(r,generation,expires)\n"
    "if op=='put' and kind(r)=='p' then call('ZADD',P..'used',call('INCR',P..'stamp'),r) end\n"
    "return {'ok',evicted}\n";

// ARGV: r, bytes there is room for ('': the head alone), pieces that may come along
static const char read[] = "local key=P..ARGV[1]\n"
                           "local v=call('HMGET',key,'head','generation','journal')\n"
                           "if not v[1] or ARGV[2]=='' then return {v[1]} end\n"
                           "local journal,pieces,entries=tonumber(v[3] or 0),{},{}\n"
                           "local payload=key..':'..(v[2] or '')\n"
                           "local count=call('HLEN',payload)\n"
                           "if count<=tonumber(ARGV[3]) then\n"
                           "  for i=0,count-1 do pieces[i+1]=call('HGET',payload,i) or '' end\n"
                           "end\n"
                           "if journal<=tonumber(ARGV[2]) then entries=call('LRANGE',key..':journal',0,-1) end\n"
                           "return {v[1],text(journal),pieces,entries}\n";

// ARGV: r after r. The number of the first that is there, from 0; -1: none
static const char find[] = "local all=ARGV[1]\n"
                           "for i=0,#all/65-1 do\n"
                           "  if call('EXISTS',P..all:sub(65*i+1,65*i+65))==1 then return i end\n"
                           "end\n"
                           "return -1\n";

// ARGV: r, late, epoch, owner
static const char delete[] = "local r=ARGV[1]\n"
                             "if late(ARGV[2]) then return {'late',text(clock())} end\n"
                             "local bytes,owner=entry(r)\n"
                             "if not bytes or owner~=ARGV[4] then return {'absent'} end\n"
                             "if fenced(r,ARGV[3]) then return {'fenced'} end\n"
                             "local expires=call('ZSCORE',P..'expiry',r)\n"
                             "local over=expires and tonumber(expires)<=clock() or call('EXISTS',P..r)==0\n"
                             "drop(r)\n"
                             "return {over and 'absent' or 'ok'}\n";

// ARGV: kind, owner, id that the last page ended with, records a page
static const char list[] =
    "local ids=call('ZRANGEBYLEX',P..'owner:'..ARGV[1]..':'..ARGV[2],'('..ARGV[3],'+','LIMIT',0,tonumber(ARGV[4])+1)\n"
    "local out={0}\n"
    "for i,id in ipairs(ids) do\n"
    "  if i>tonumber(ARGV[4]) then out[1]=1 break end\n"
    "  out[#out+1]=id\n"
    "  out[#out+1]=call('HGET',P..ARGV[1]..id,'head') or ''\n"
    "end\n"
    "return out\n";

// ARGV: r, late, epoch ('0': take it), owner, holder, milliseconds, those that a wish lives
static const char lease[] =
    "local r=ARGV[1]\n"
    "if late(ARGV[2]) then return {'late',text(clock())} end\n"
    "local _,owner=entry(r)\n"
    "if owner and owner~=ARGV[4] then return {'absent'} end\n"
    "local key,now=P..r..':lease',clock()\n"
    "local held=call('HMGET',key,'holder','epoch','until')\n"
    "local epoch=ARGV[3]\n"
    "if epoch~='0' and held[2]~=epoch then return {'taken'} end\n"
    "if epoch=='0' then\n"
    "  local left=tonumber(held[3] or 0)-now\n"
    "  if held[1] and held[1]~=ARGV[5] and left>0 then\n"
    "    call('SADD',P..'wished:'..held[1],r..ARGV[4])\n"
    "    call('PEXPIRE',P..'wished:'..held[1],ARGV[7])\n"
    "    return {'busy',text(left)}\n"
    "  end\n"
    "  local t=call('TIME')\n"
    "  epoch=text(math.max(tonumber(t[1])*1000000+tonumber(t[2]),tonumber(call('GET',P..'epoch') or 0)+1))\n"
    "  call('SET',P..'epoch',epoch)\n"
    "end\n"
    "local ends=now+tonumber(ARGV[6])\n"
    "call('HSET',key,'holder',ARGV[5],'epoch',epoch,'until',text(ends))\n"
    "call('PEXPIREAT',key,text(ends+86400000))\n"
    "local expires=tonumber(call('ZSCORE',P..'expiry',r) or 0)\n"
    "if expires>0 and ends>expires then outlast(r,call('HGET',P..r,'generation') or '',expires) end\n"
    "return {'ok',epoch}\n";

// ARGV: r, late, epoch, owner
static const char release[] = "local r=ARGV[1]\n"
                              "if late(ARGV[2]) then return {'late',text(clock())} end\n"
                              "local _,owner=entry(r)\n"
                              "if owner and owner~=ARGV[4] then return {'absent'} end\n"
                              "if not fenced(r,ARGV[3]) then call('DEL',P..r..':lease') end\n"
                              "return {'ok'}\n";

// ARGV: late, holder, wishes at most
static const char wishes[] = "if late(ARGV[1]) then return {'late',text(clock())} end\n"
                             "return {'ok',call('SPOP',P..'wished:'..ARGV[2],ARGV[3])}\n";

static const char usage[] =
    "return {call('GET',P..'bytes') or '0',call('HLEN',P..'records:s'),call('HLEN',P..'records:p')}\n";

// ARGV: records that go at most. One whose lease still lives stays.
static const char sweep[] = "local now,most,at,gone=clock(),tonumber(ARGV[1]),0,0\n"
                            "while gone<most and at<64*most do\n"
                            "  local over=call('ZRANGEBYSCORE',P..'expiry','-inf',text(now),'LIMIT',at,most)\n"
                            "  if #over==0 then break end\n"
                            "  for _,r in ipairs(over) do\n"
                            "    if gone==most then break end\n"
                            "    if tonumber(call('HGET',P..r..':lease','until') or 0)>now then at=at+1\n"
                            "    else drop(r) gone=gone+1 end\n"
                            "  end\n"
                            "end\n"
                            "return gone\n";

// ARGV: snapshots that were read, in this order
static const char touch[] = "for _,r in ipairs(ARGV) do call('ZADD',P..'used','XX',call('INCR',P..'stamp'),r) end\n"
                            "return 0\n";

char *eng_redis_script_text(eng_redis_script script) {
    // Without flags a script is refused as a whole where the server has no memory left; what frees some, or needs next
    // to none, is let through, and what reads alone also runs on a server that cannot write.
    static const char plain[] = "#!lua\n", frees[] = "#!lua flags=allow-oom\n", reads[] = "#!lua flags=no-writes\n";
    static const struct {
        const char *flags, *body;
    } scripts[ENG_REDIS_SCRIPTS] = {
        [ENG_REDIS_PEEK] = {frees, peek},     [ENG_REDIS_WRITE] = {plain, write},
        [ENG_REDIS_READ] = {reads, read},     [ENG_REDIS_FIND] = {reads, find},
        [ENG_REDIS_DELETE] = {frees, delete}, [ENG_REDIS_LIST] = {reads, list},
        [ENG_REDIS_LEASE] = {frees, lease},   [ENG_REDIS_RELEASE] = {frees, release},
        [ENG_REDIS_USAGE] = {reads, usage},   [ENG_REDIS_SWEEP] = {frees, sweep},
        [ENG_REDIS_TOUCH] = {frees, touch},   [ENG_REDIS_WISHES] = {frees, wishes},
    };
    const char *parts[] = {scripts[script].flags, prelude, scripts[script].body};
    size_t length = 0;
    for (int i = 0; i < 3; i++)
        length += strlen(parts[i]);
    char *text = malloc(length + 1), *at = text;
    for (int i = 0; text && i < 3; i++) {
        size_t bytes = strlen(parts[i]);
        memcpy(at, parts[i], bytes + 1);
        at += bytes;
    }
    return text;
}
