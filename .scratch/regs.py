import sys,io,re,time,torch,itertools,dataclasses; sys.path.insert(0,'/work/main/src')
from kullback.backends import cuda
from kullback.backends.cuda import plan
from kullback.divergences import DIVERGENCES
for mb,un in [(4,4),(4,1)]:
  print('min blocks',mb,'unroll',un)
  for k in sys.argv[1:] or ['kl','jensen_shannon','alpha']:
    row=[]
    for dt,flat,want in itertools.product([torch.float32,torch.bfloat16],[True,False],[(False,False),(True,False),(True,True)]):
        s=dataclasses.replace(plan.shape(16384,flat,dt,dt,any(want)),min_blocks=mb,unroll=un)
        if flat and k=='renyi': continue
        log=io.StringIO()
        cuda.compile_cubin(cuda.source(cuda.Variant(k,'probs','probs',dt,dt,torch.float64,torch.float32,True,want,s)),'sm_90a',('-v','-warn-spills'),log)
        row.append(re.search(r'Used (\d+) registers',log.getvalue()).group(1)+('S' if re.search(r'[1-9]\d* bytes spill',log.getvalue()) else ''))
    print(' ',k,row,flush=True)
