import torch
from kullback.backends import cuda
src='''
extern "C" __global__ void f(const float*x,float*l,float*r,float*e,long long n){ for(long long i=blockIdx.x*256ll+threadIdx.x;i<n;i+=gridDim.x*256ll){ float a; asm("lg2.approx.ftz.f32 %0, %1;":"=f"(a):"f"(x[i])); l[i]=a; asm("rcp.approx.ftz.f32 %0, %1;":"=f"(a):"f"(x[i])); r[i]=a; asm("ex2.approx.f32 %0, %1;":"=f"(a):"f"(x[i]-1.0f)); e[i]=a; } }
'''
L=cuda.Launcher(src,'f',0)
n=1<<22
for k in (-20,-8,-3,-2,-1,0,1,2,5,15):
    for lo,hi in ((1,1.125),(1.125,1.5),(1.5,1.875),(1.875,2)) if k in(-1,0) else ((1,2),):
        x=(torch.rand(n,device='cuda',dtype=torch.float64)*(hi-lo)+lo).float()*2.0**k
        l,r,e=torch.empty_like(x),torch.empty_like(x),torch.empty_like(x)
        L(1<<20,x.data_ptr(),l.data_ptr(),r.data_ptr(),e.data_ptr(),n)
        xd=x.double(); el=l.double()-xd.log2(); er=r.double()*xd-1; ee=e.double()/torch.exp2((x-1.0).double())-1
        print(k,lo,hi,'lg2 mean %.2e std %.2e max %.2e | rcp mean %.2e std %.2e | ex2 mean %.2e std %.2e'%(el.mean(),el.std(),el.abs().max(),er.mean(),er.std(),ee.mean(),ee.std()))
