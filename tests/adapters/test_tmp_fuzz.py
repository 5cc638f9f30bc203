import random, pytest, time
from pdserve.config import InstanceConfig, EngineConfig
from pdserve.engine.engine import Engine
from pdserve.instance.instance import Instance
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from tests.low_rank import make_adapter, with_settings, Made, modules
from tests.outputs import outputs_of
import os

@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS","3"))))
def test_fuzz(checkpoint, tmp_path, seed):
    r = random.Random(seed)
    base = checkpoint("llama", dtype="float32"); folder = tmp_path / "f"
    for i, n in enumerate("abcd"):
        make_adapter(folder / n, base, rank=4, seed=i, **({"alora_invocation_tokens":[5,6]} if n=="d" else {}))
    answers = {}; errors={}; embeds={}
    outs = {"A": [], "B": []}
    insts = {}
    changed = []
    for name in "AB":
        def send(link, frame, name=name):
            if frame.WhichOneof("frame") == "adapter_changed": changed.append(frame.adapter_changed.error)
            else: outs[name].extend(outputs_of(frame))
        cfg = InstanceConfig(model=str(base), connector=f"memory://lf{seed}{os.getpid()}", num_blocks=r.choice([7,9,14,30]), max_model_len=96, device="cpu",
            lora_folder=str(folder), max_loras=2, max_num_seqs=r.choice([3,8]), max_num_batched_tokens=r.choice([16,64]), speculate=r.choice(["off","ngram"]), swap_space=r.choice([0,0.001]))
        insts[name] = Instance(cfg, send)
    digest = {}
    def load(name):
        for i in insts.values():
            k=len(changed)
            i.change_adapter("router", pb.ChangeAdapter(number=1, name=name, path=name, replaces=True))
            while len(changed)==k: i.run_once(wait=False); time.sleep(.001)
            assert changed[-1]=="" , changed[-1]
        for one in insts["A"].engine.adapters.listing(): digest.setdefault(one.name, one.digest)
    for n in "abcd": load(n)
    d = {n: digest[n] for n in "abcd"}
    oracle_engine = Engine(EngineConfig(model=str(base), dtype="float32", num_blocks=400, lora_modules=",".join(f"{n}={folder/n}" for n in "abcd"), max_loras=4))
    memo={}
    def start_of(a, prompt):
        if a!="d": return 0
        for i in range(len(prompt)-2,-1,-1):
            if prompt[i:i+2]==[5,6]: return i
        return None
    def oracle(a, prompt, mt):
        k=(a,tuple(prompt),mt)
        if k not in memo:
            s=oracle_engine.new_sequence("o",Request(prompt=prompt,sampling=SamplingParams(temperature=0,max_tokens=mt,ignore_eos=True),adapter=d[a] if a else b"",adapter_start=start_of(a,prompt) or 0, salt="x"))
            if a: assert oracle_engine.adapters.acquire(s)
            oracle_engine.add(s)
            while not s.output.finish_reason(): oracle_engine.step()
            oracle_engine.remove(s); memo[k]=s.output.generated.tolist()
        return memo[k]
    live={}; n=0; tokens={}; done=0; bad=0
    def submit():
        nonlocal n
        a=r.choice(["","a","b","c","d"]); L=r.choice([3,16,17,32,40,63])
        prompt=[r.randrange(7,12) for _ in range(L)]
        if r.random()<.5: prompt=[8]*(L//2)+prompt[L//2:]
        if a=="d":
            at=r.randrange(0,max(1,L-2)); prompt[at:at+2]=[5,6]; prompt=prompt[:max(L,at+2)]
            if start_of(a,prompt) is None: return
        mt=r.randrange(1,33); m=r.choice([0,0,0,2])
        ids=[f"{n}-{i}" for i in range(m+1)]; n+=1
        req=Request(prompt=prompt,sampling=SamplingParams(temperature=0,max_tokens=mt,ignore_eos=True),adapter=d[a] if a else b"",adapter_start=start_of(a,prompt) or 0, multi_turn=r.random()<.5).pack()
        members=[pb.Member(request_id=x,seed=0) for x in ids[1:]]
        pd=r.random()<.6 and mt>1
        msg=lambda phase: pb.Submit(request_id=ids[0],phase=phase,request=req,members=members)
        if pd:
            insts["A"].submit("r",msg(pb.PREFILL)); insts["B"].submit("r",msg(pb.DECODE))
        else: insts[r.choice("AB")].submit("r",msg(pb.BOTH))
        for x in ids: live[x]=(a,prompt,mt,pd); tokens[x]=[]
    def pump():
        nonlocal done
        for name in "AB":
            got, outs[name] = outs[name], []
            for o in got:
                x=o.request_id
                if x not in live: continue
                a,prompt,mt,pd=live[x]
                if o.error is not None: errors[x]=o.error; del live[x]; assert o.error.kind in("unknown_adapter",), o.error; 
                if x not in live:
                    for i in insts.values(): i.cancel("r",x)
                    continue
                if pd and name=="A":
                    st=o.stored
                    hm=pb.HandOver(request_id=x)
                    if st is not None: hm.num_blocks, hm.coming, hm.final = st.num_blocks, st.coming, st.final
                    if o.token_ids: hm.first_token=o.token_ids[0]; tokens[x].append(o.token_ids[0])
                    if st is not None or o.token_ids: insts["B"].hand_over("r",hm)
                    continue
                tokens[x]+=o.token_ids
                if o.finish_reason:
                    assert tokens[x]==oracle(a,prompt,mt), (x,a,len(prompt),mt,tokens[x],oracle(a,prompt,mt))
                    done+=1; del live[x]
    for step in range(250):
        if step<180:
            if r.random()<.35: submit()
            if r.random()<.06: load(r.choice("abcd"))
            if r.random()<.04:
                insts[r.choice("AB")].change_adapter("router",pb.ChangeAdapter(number=1,name=r.choice("abcd"),path=""))
            if live and r.random()<.15:
                x=r.choice([*live]); 
                for i in insts.values(): i.cancel("r",x)
                del live[x]
        for i in insts.values(): i.run_once(wait=False)
        pump()
    end=time.time()+60
    while live or any(i.num_jobs for i in insts.values()):
        assert time.time()<end, ("stuck",live, [i.num_jobs for i in insts.values()])
        for i in insts.values(): i.run_once(wait=False)
        pump()
    for i in insts.values():
        ad=i.engine.adapters
        assert not ad._holders and not ad._denied and not i._slotless
        for _ in range(3): i.run_once(wait=False)
        assert i.engine.pool.num_held==0
    print("DONE",seed,"answers",done,"errors",len(errors),"preempt",[i.engine.scheduler.num_preemptions for i in insts.values()], [i.engine.scheduler.swap_space.num_swaps for i in insts.values()])
    for i in insts.values(): i.close()
