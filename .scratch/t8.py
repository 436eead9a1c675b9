import sys,io,re,time,torch,itertools; sys.path.insert(0,'/work/main/src')
from kullback.backends import cuda
from kullback.backends.cuda import plan
from kullback.divergences import DIVERGENCES
import dataclasses
def regs(v,arch='sm_90a'):
    log=io.StringIO(); t=time.time()
    try: cuda.compile_cubin(cuda.source(v),arch,log)
    except Exception as e: return 'ERR '+str(e)[-3000:],0
    m=re.search(r'Used (\d+) registers',log.getvalue()); return m and m.group(1), round(time.time()-t,2)
mb=int(sys.argv[1]) if len(sys.argv)>1 else 1
for k in DIVERGENCES:
    row=[]
    for dt,flat,want in itertools.product([torch.float32,torch.bfloat16],[True,False],[(False,False),(True,False),(True,True)]):
        s=dataclasses.replace(plan.shape(16384,flat,dt,dt,any(want)),min_blocks=mb)
        r=regs(cuda.Variant(k,'probs','probs',dt,dt,torch.float64,torch.float32,True,want,s))
        row.append(r)
        if str(r[0]).startswith('ERR'): print(r[0]); sys.exit()
    print(k,row,flush=True)
